"""Finds the lines of an application's text that a library wrote which sees the hardware.

An application may print or quote anything. So in its text, a rule of hardware counts only if a library speaks: its
wording begins the message, and the exception has a type that such libraries raise. The kernel's words count only in the
kernel's log. Standard library only: ranks import it.
"""

from __future__ import annotations

import re

from unicron_detector.failures.statements import COLLECTORS, LAUNCHERS, exception

# Types that carry a library's words among others, and types that one library alone raises.
_CARRIERS = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:RuntimeError|SystemError|UserWarning|OSError|InternalError|LogicError|(?:c10::)?\w*Error_?Impl)"
)
_OF_A_LIBRARY = re.compile(
    r"(?:(?:torch|c10|cupy|numba|pycuda|jaxlib|cuda|pynvml|tensorflow)[\w.:]*[.:])?"
    r"(?:AcceleratorError|Dist(?:Backend)?Error|NVMLError\w*|XlaRuntimeError|CUDARuntimeError|CUDADriverError|"
    r"CudaAPIError|NcclError|c10::(?:\w*::)*\w*Error)|(?:torch\.cuda|cupy\w*|numba\.cuda|pycuda|pynvml)\.[\w.]+|c10::\w+"
)
# Types that Python and programs raise of their own data.
_OF_THE_PROGRAM = re.compile(
    r"(?:\w+\.)*(?:Value|Key|Type|Index|Attribute|Assertion|Name|UnboundLocal|ZeroDivision|NotImplemented|Lookup|Syntax|"
    r"Unicode\w*|JSONDecode|Validation)Error"
)
_QUOTATION = re.compile(r"\"[^\"\n]{1,300}\"|`[^`\n]{1,300}`|(?<!\w)'[^'\n]{1,300}'(?!\w)")
# Not types, though they are written like one: a library's own words, and labels of loggers.
_NO_TYPE = re.compile(
    r"CUDA\w*|HIP\w*|NCCL\w*|RCCL\w*|NVML\w*|NVIDIA\w*|CU[A-Z]+_\w+|INTERNAL|ERROR|FATAL|CRITICAL|E|F|E[0-9A-Z]\d{4}"
)
# Prefixes of loggers, launchers and C++.
_BEFORE = re.compile(
    rf"(?:{LAUNCHERS}|{COLLECTORS}|"
    r"(?!nvidia-|(?-i:E[0-9A-Z]\d{4}): )(?=[\w.-]{0,63}[\d-])"
    r"[A-Za-z][\w.-]{0,63}(?<!Error)(?<!Exception)(?::\d{1,6})?: |"
    r" {0,4}\d{1,6}: |"
    r"\[(?!NRT_|ND \d|MLA \d)[^\]\n]{0,120}\](?:: ?| |(?=\[))|"
    r"[EF]\d{4,8} [\d:.]+ +\d+ \S+:\d+\] ?|\d{4}-\d\d-\d\d[T -][\d:.,]+:? |RecentErrMsg: |"
    r"[EF] \S+:\d+\] |[EF]\d* \S+:\d+\] |(?:ERROR|FATAL|CRITICAL|INTERNAL)(?::[\w.]+)?: ?|what\(\): +|"
    r"slurmstepd\S{0,64}: error: |pyxis: +|[\w.-]{1,64}:\d+:\d+ \[-?\d+\] |"
    r"Error \([\w./-]+:\d+\): |\S{1,80}\.\w{1,4}:\d+: |"
    r"(?:\S{0,80}docker: )?Error response from daemon: [^\n]{0,400}?(?=nvidia-container-cli)|"
    r"stderr: |\S{1,80}\.\w{1,4}:\d+ (?:\((?:[^()\n]|\(\)){1,120}\) )?|"
    r"Attempting to fetch value instead of handling error |failed initializing StreamExecutor[^\n:]{0,60}: |"
    r"(?:NCCL|Process group) watchdog thread terminated with exception: |"
    r"terminating with uncaught exception of type [\w:]+: |Exception \(either an error or timeout\)[^\n:]{0,60}: )+",
    re.IGNORECASE,
)
_TORCH_NPU = r"(?:NPU|OPS|HCCL|ACL) (?:function )?error(?: in)?[:,]|The Inner error is reported as above"
# What CANN writes: "EL0005: ", "E39999[PID: 1] ", "RUNTIME(42,python):".
_CANN = r"(?-i:(?:[A-Z]\w{1,40}\()?E[0-9A-Z]\d{4}(?:\)|\[PID: ?\d+\])?(?::| )|[A-Z]{2,12}\(\d+,[^)\n]{1,40}\):)"
_OF_TORCH_NPU = re.compile(_TORCH_NPU, re.IGNORECASE)
_BEGINS = re.compile(
    r"(?:(?:CUDA|HIP|ROCm|NCCL|RCCL|NVML|cuDNN|cuBLAS\w*|cuSOLVER|cuFFT|MIOpen|Triton|OpenCL)\b[ \w]{0,20}"
    r"\b(?:error|failure|failed|call|warn|initialization|communicator)|"
    r"(?:cuda|hip|nccl|cublas|cudnn)(?:Error|Unhandled|System|Internal|Remote|Get|Malloc|Stream|Device|Event|Mem)\w*|"
    r"(?:CUDA|NVML|HIP|HSA)_(?:ERROR|STATUS)_|(?:CUBLAS|CUDNN|CUSOLVER|CUFFT)_\w+|"
    r"(?:(?:failed )?call to |operation )?(?-i:cu[A-Z]\w+)|cxil_\w+|ibv_\w+|"
    r"failed call to hip(?-i:[A-Z])|"
    rf"{_TORCH_NPU}|{_CANN}|\(FATAL-RT-UNDEFINED-STATE\)|\[(?:ND|MLA) \d+\]|synStatus\b|(?-i:syn[A-Z])\w+ failed|"
    r"Graph compile failed\. synStatus|\[?NRT_(?-i:[A-Z])|nrt_\w+|NeuronDevice::|"
    r"failed to (?:execute|load) the model status=|(?:HCCL demo error: )?In function \w+\(\): syn|"
    r"\d{4}-(?-i:[A-Z][a-z]{2})-\d\d [\d:.]{8,16} +\d+:\d+ +ERROR +\w+:\w+|level_zero backend failed|"
    r"oneCCL: |(?:UR|ZE)_RESULT_ERROR_|"
    r"unexpected error from cuda\w+|no CUDA-capable device|no ROCm-capable device|no HIP GPUs|"
    r"(?:\w{1,40}: )?(?:failed|unable) to init(?:ialize)? (?:CUDA|HIP|NVML)|"
    r"OS call failed or operation not supported|No devices were found|"
    r"all CUDA-capable devices|CUDA-capable device|nvidia-smi has failed|nvidia-container-cli: |"
    r"unable to determine the device handle for gpu|failed to initialize NVML|couldn't init CUDA|"
    r"HW Exception by GPU node|Memory access fault by GPU|GPU Hang\b|system not yet initialized)",
    re.IGNORECASE,
)


def library_lines(text: str) -> str:
    """Return the lines in which a library speaks; empty if the text is the application's own."""
    bare = _bare(text)
    raised = exception(bare)
    if raised and _OF_A_LIBRARY.fullmatch(raised.group(1)):
        return text
    if raised and not _NO_TYPE.fullmatch(raised.group(1)):
        if not _CARRIERS.fullmatch(raised.group(1)):
            return ""
        bare = _bare(bare[raised.end() :])
        if _OF_TORCH_NPU.match(bare):  # the lines below are CANN's, and name the cause
            return bare
        if not _is_of_a_library(bare):  # a program's message; below it may stand what another printed
            return ""
    return "\n".join(line for line in bare.splitlines() if _is_of_a_library(_bare(line)))


def _is_of_a_library(line: str) -> bool:
    raised = exception(line)
    if raised and _OF_A_LIBRARY.fullmatch(raised.group(1)):
        return True
    if raised and _CARRIERS.fullmatch(raised.group(1)):
        line = _bare(line[raised.end() :])
    return _BEGINS.match(line) is not None


def own_words(text: str) -> str:
    """Blank the parts that rules of the network must not read: exceptions of the program's own data, and quotations."""
    raised = exception(_bare(text))
    if raised and _OF_THE_PROGRAM.fullmatch(raised.group(1)):
        return ""
    if raised and raised.group(1) in ("RuntimeError", "Exception"):
        return _QUOTATION.sub(lambda quoted: " " * len(quoted.group()), text)
    return text


def _bare(text: str) -> str:
    text = text.lstrip()
    before = _BEFORE.match(text)
    return text[before.end() :] if before else text
