"""Takes secrets out of text that leaves the cluster: by the names before them, by their forms, and by their values.

It cannot know every secret: whoever sends a text looks through it first. Where it is not sure, it takes out too much.
"""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

TAKEN_OUT = "***"
LEAST = 6  # characters of a value that is looked for everywhere: shorter ones are words, too
NOISE = 28  # characters of a word that may be a secret by its look alone
# Every repetition is bounded: whoever writes long words into a log must not keep its reader busy.

# ---------------------------------------------------------------- names
_KEYS = (
    "api access private public peer secret client encryption signing master account storage shared ssh license enc aes"
    " hmac wandb deploy"
)
_NAME = (
    r"[\w.-]{0,100}(?:(?P<token>token(?!iz))|passwor[dt]|passwd|passphrase|passcode|secret|credential|authorization|cookie"
    rf"|webhook|sshpass(?![a-z])|(?:{'|'.join(_KEYS.split())}|pre[_-]?shared|session)[ _-]?key|key[_-]data"
    r"|conn(?:ection)?[_-]?string"
    r"|(?<![a-z])(?:slack|creds?|jwt|psk)(?![a-z_])|(?<![a-z])auth[_-]?key|_pwd(?![a-z])|_pass(?![a-z])"
    r"|(?:storage|comp|db|dbd|smtp|ldap|user|admin|root|bind)pass(?![a-z])"
    r"|(?<![a-z])(?:pw|t?otp|csrf|hmac)(?![a-z])|totp_?seed|(?:access|amz)[_-]?signature|askpass"
    r")[\w.-]{0,100}"
)
_SECRET_NAME = re.compile(rf"(?i)\A(?:{_NAME}|.*_key|key|pass|pwd)\Z")
# A number after `max_tokens` is what support needs.
_NO_COUNT = r"(?(token)(?!-?\d[\d._]{0,20}[kKMBT]?(?![\w.+/=-])))"

# ---------------------------------------------------------------- values
_QUOTE = r"\\{0,7}[\"']"  # in JSON within JSON it has backslashes


def _string(group: str) -> str:
    """A whole string with its quotes, over several lines, too: "...", b'...', $'...', SecretStr('...')."""
    opening = rf"(?:[\w.]{{0,40}}\()?[$A-Za-z]{{0,2}}(?P<{group}>\\{{0,7}}(?:\"\"\"|'''|[\"'])|&(?:quot|apos|#3[49]);)"
    return rf"{opening}(?:(?!(?P={group}))(?:\\{{1,20}}[^\\]|[^\\])){{0,2000}}(?P={group})"


_BARE = r"(?:\\ |[^\s,;\"'`}\])]|[,;\"'}\])](?=[^\s,;:\"'`}\])]))+"
# Strings that stand together are one (pprint, a shell); a string whose end is missing goes to the end of the line.
_VALUE = (
    rf"(?:{_string('quote')}(?:(?:\s|\\\r?\n){{0,80}}{_string('more')}){{0,50}}"
    rf"|{_QUOTE}[^\n]*|[\[({{][^\])}}]{{0,2000}}[\])}}]|{_BARE})"
)
_GAP = r"(?:\s|\\\r?\n){1,80}"  # between words of a command, that goes on in the next line, too
_IS = r"\s{0,80}(?:=>|->|:=|[+?]?={1,3}|:(?!:)|%3[ad])[ \t]{0,80}(?:\\?\r?\n[ \t]{0,80})?"
_NAMED = rf"(?<![\w.-])(?:{_QUOTE})?{_NAME}(?:{_QUOTE}|&(?:quot|apos|#3[49]);)?[\])]?"
_NEXT = rf"(?:\s{{0,80}},\s{{0,80}}|[ \t]{{0,80}}\n[ \t]{{0,80}}-[ \t]{{1,80}}|{_GAP})"  # the next word of a list
_OPTION = rf"(?<![\w-])--?+(?!password-stdin){_NAME}(?:{_QUOTE})?{_NEXT}"
_CONTAINERS = "docker|podman|nerdctl|buildah|skopeo|helm|oc|az|apptainer|singularity"

_DEEPER = r"\n(?:[ \t]{0,80}\n){0,3}(?P=deep)(?(item)[ \t]{3}|[ \t])[^\n]*"


def _option_of(programs: str, options: str, gap: str = r"(?:[\"']?[\s,]{1,80}|=)?") -> str:
    """An option that is a secret for these programs only, as `mysql -pSECRET`; in a list of words, too."""
    return rf"(?<![\w-])(?:{programs})(?![\w-])[^\n]{{0,500}}?[\"'\s](?:{options}){gap}"


_KEY_BEGINS = r"-{4,5} ?BEGIN (?:[A-Z0-9 ]{0,30}PRIVATE KEY|OpenVPN Static key)[A-Z0-9 ]{0,10} ?-{4,5}"
_KEY_ENDS = r"-{4,5} ?END (?:[A-Z0-9 ]{0,30}PRIVATE KEY|OpenVPN Static key)[A-Z0-9 ]{0,10} ?-{4,5}"

# What stands before a secret, and stays; and the secret, with its quotes.
_HEADED = tuple(
    (re.compile(rf"(?P<head>{head}){secret}"))
    for head, secret in (
        # A line of YAML or of an environment: all of the line, and what is indented below it.
        (
            rf"(?im:^(?P<deep>[ \t]{{0,200}})(?P<item>-[ \t]{{1,80}})?(?:export[ \t]{{1,80}})?[\"']?{_NAME}"
            rf"[\"']?[ \t]{{0,80}}(?::=|:|=(?![=>]))[ \t]{{0,80}}+){_NO_COUNT}",
            rf"(?![$A-Za-z]{{0,2}}{_QUOTE}|[\w.]{{1,40}}\()(?=[^\n]|{_DEEPER})[^\n]*(?:{_DEEPER}){{0,100}}",
        ),
        # A header: its value has several words. In a string it ends with that.
        (
            rf"(?i:(?<![\w.-])(?P<in>{_QUOTE})?[\w-]{{0,40}}(?:authorization|cookie)[\w-]{{0,40}}(?P<closed>(?(in)(?P=in)|(?!)))?{_IS})",
            rf"(?(closed){_VALUE}|(?(in)(?:(?!(?P=in))[^\n]){{1,4000}}|[^\n]+))",
        ),
        (rf"(?i:{_NAMED}{_IS}){_NO_COUNT}", _VALUE),
        (rf"(?i:{_OPTION}){_NO_COUNT}(?!{_QUOTE}-|-)", _VALUE),
        # {"name": "NAME", "value": "value"} of containers, and ("NAME", "value").
        (
            rf"(?i:\b(?:name|key|header)(?:{_QUOTE})?\s{{0,80}}[:=]\s{{0,80}}(?:{_QUOTE})?{_NAME}(?:{_QUOTE})?[\s,;]{{1,80}}"
            rf"(?:{_QUOTE})?val(?:ue)?(?:{_QUOTE})?\s{{0,80}}[:=]\s{{0,80}})",
            _VALUE,
        ),
        (
            rf"(?i:{_QUOTE}{_NAME}{_QUOTE}\s{{0,80}},\s{{0,80}})(?=[$A-Za-z]{{0,2}}{_QUOTE})(?!{_QUOTE}\w{{1,40}}{_QUOTE}\s{{0,80}}:)",
            _VALUE,
        ),
        # `setenv NAME value`, `ENV NAME value`, `aws configure set NAME value`.
        (rf"(?i:\b(?:setenv|env|set|config)(?:{_GAP}--?\w{{1,40}}){{0,3}}{_GAP}{_NAME}{_GAP})(?![-=|])", _VALUE),
        (rf"(?i:<{_NAME}(?:\s[^<>]{{0,200}})?>)", r"[^<]{1,2000}"),
        # `key` and `auth` are words: here the value has to look like one, too.
        (r"\b[A-Z][A-Z0-9_]{0,100}_KEY[\"']?\]?\s{0,80}[:=]\s{0,80}", _VALUE),
        (r"(?i:\bkey[\"']?\s{0,80}[:=]\s{0,80}[\"']?)(?=[^\s]{0,200}\d)", r"[A-Za-z0-9+/=]{16,}(?![\w.])"),
        (
            r"(?i:\b_?auth[\"']?\s{0,80}[:=]\s{0,80}[\"']?)(?=[^\s]{0,200}[A-Z=])(?=[^\s]{0,200}[a-z])",
            r"[A-Za-z0-9+/=]{8,}",
        ),
        (r"(?i:(?<![\w.-])(?:[\w-]{0,40}[_-])?pwd[\"']?\s{0,80}[:=]\s{0,80}(?![\"']?/))", _VALUE),
        (rf"(?i:(?<![\w.-])pass(?:[\"']\s{{0,80}}[:=]\s{{0,80}}|=|\s{{0,80}}[:=]\s{{0,80}}(?={_QUOTE})))", _VALUE),
        # Words of text: a prompt, .netrc, "the password is x1".
        (r"(?i:\bpass(?:word|phrase|code)\b(?: for '[^'\n]{1,200}'|[^\n:=\"',\[\]{}]{1,60})[:=]\s{0,80})", _VALUE),
        (r"(?im:\blogin\s{1,80}\S{1,200}\s{1,80}password\s{1,80}|^[ \t]{0,80}password[ \t]{1,80})", _VALUE),
        (
            r"(?i:\b(?:password|passphrase|secret|token|api[ _-]?key)\s{1,80}(?:is|was)[:\s]\s{0,80})",
            rf"(?=[^\s]{{0,200}}[\d\"']){_VALUE}",
        ),
        (r"(?i:\b(?:bearer|password|passwd)\s{1,80})", r"[^\s\"',;]{6,}"),
        (r"(?i:\bbasic\s{1,80})(?=[^\s]{0,200}[\d=])", r"[A-Za-z0-9+/=]{8,}"),
        # Options of one letter.
        (rf"{_option_of('(?:mysql|mariadb)[a-z_-]{0,40}', '-p', '')}(?=[\"']?[^\s\"',\])])", _VALUE),
        (_option_of(r"sshpass|racadm|redfishtool|ipmi[a-z-]{2,20}|bmc-[a-z]{1,20}", "-p|-P"), _VALUE),
        (_option_of(r"(?:7z[a-z]?|zip|unzip|rar|sqlcmd|isql|bcp|mosquitto_[a-z]{1,20})", "-P|-p"), _VALUE),
        (_option_of(rf"(?:{_CONTAINERS})[\"'\s,]{{1,6}}[^\n]{{0,80}}?login", "-p"), _VALUE),
        (_option_of("redis-cli|http|https|xh", "-a|--auth"), _VALUE),
        (_option_of("ldap[a-z]{1,20}", "-w"), _VALUE),
        (_option_of("snmp[a-z]{1,20}", "-[AXc]"), _VALUE),
        (_option_of("ssh-keygen", "-[NP]"), _VALUE),
        (_option_of("openssl", "-(?:k|K|passin|passout)"), _VALUE),
        # USER and secret in one word: all of it.
        (_option_of("smbclient|rpcclient|lftp", "-[uU]"), _VALUE),
        (rf"(?i:(?<![\w-])--(?:proxy-)?(?:auth|user){_NEXT})(?!\d{{1,10}}:\d)(?=\S{{1,200}}:\S)", _VALUE),
        (r"(?i:\bnet[ \t]{1,20}use[ \t]{1,20}(?:\w:|\*|\\\\\S{1,200})[ \t]{1,20})(?!/)", _VALUE),
        (r"(?i:\bkinit\b[^\n|;]{0,200}<<<[ \t]{0,20})", _VALUE),
        (r"(?i:\bwandb(?::[ \t]{1,20}key[ \t]{1,20}|\.login\([^)\n]{0,80}?\bkey[ \t]{0,20}=[ \t]{0,20}))", _VALUE),
        (r"(?i:\b(?:conda|vault)[ \t]{1,20}token[ \t]{1,20}(?:set[ \t]{1,20})?)(?!-)", _VALUE),
        (rf"(?i:\bconfig{_GAP}create{_GAP}[^\n]{{0,200}}?{_NAME}{_GAP})(?![-=|])", _VALUE),
        (r"(?i:\bsend[ \t]{1,20}(?:--[ \t]{1,20})?)(?=\"[^\"\n]{1,200}\\r\")", _VALUE),  # expect
        (_option_of(r"curl|wget|aria2c", r"-[uU]|--(?:proxy-)?user"), _VALUE),
        (r"(?i:\b(?:wandb|vault)[\"'\s,]{1,6}login[\"'\s,]{1,6})(?!-)", _VALUE),
        (r"\bpass:(?=\S)", _VALUE),
        (
            r"\b(?:echo|printf)[ \t]{1,20}(?:-n[ \t]{1,20})?",
            r"[^\n|]{1,200}(?=\|[^\n]{0,200}(?:--password-stdin|--stdin|sudo -\w{0,5}S|login))",
        ),
        # URLs: user and password, the query, and all of a webhook's path.
        (
            r"(?i:\b[a-z][a-z0-9+.-]{0,20}://)(?=[^\s\"'<>]{0,500}@)",
            r"(?:[^\s/\"'<>:@]{0,200}:[^\s\"'<>]{0,300}|[^\s/@\"'<>]{1,300})(?=@)",
        ),
        (r"(?i:https?://[^\s/\"'<>]{0,200}(?:hook|discord|office|zapier|teams)[^\s/\"'<>]{0,200}/)", r"[^\s\"'<>]+"),
        (r"(?i:https?://[^\s\"'<>]{0,300}/(?:web)?hooks?/)", r"[^\s\"'<>]+"),
        (r"(?i:https?://(?:api\.telegram\.org/bot|ntfy\.sh/))", r"[^\s\"'<>]+"),
        (r"(?i:\bjdbc:oracle:thin:[^\s/@]{1,100}/)", r"[^\s@]{1,200}(?=@)"),
        (r"(?i:\b[a-z][a-z0-9+.-]{0,20}://[^\s\"'<>?]{1,500}\?)", r"[^\s\"'<>]+"),
        (r"(?m:^[^\s:]{1,200}:(?:\d{2,5}|\*):[^\s:]{1,100}:[^\s:]{1,100}:)", r"(?m:\S+$)"),  # .pgpass
        (r"Private-Lines:[ \t]{0,9}\d{1,4}", r"(?:\r?\n[^\n:]{1,200}(?=[\r\n]|\Z)){1,200}"),  # PuTTY
    )
)
# What is a secret by its own form: keys that begin with the name of who has issued them, and others.
_PREFIXES = (
    "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ hf_ sk- sk_live_ rk_live_ xoxa- xoxb- xoxe- xoxp- xoxr- xoxs- xapp- npm_"
    " pypi- dckr_pat_ nvapi- whsec_ r8_ gsk_ xai- shpat_ rubygems_ GOCSPX- dop_v1_ hvs. AIza ya29. SG. ATATT"
    " AGE-SECRET-KEY- local-"
)
_FORMS = tuple(
    map(
        re.compile,
        (
            rf"(?s){_KEY_BEGINS}.*?(?:{_KEY_ENDS}|\Z)",
            rf"[^\n]{{0,200}}\n[^\n]{{0,100}}{_KEY_ENDS}",  # the end of one whose beginning is cut off
            r"\bMUNGE:[A-Za-z0-9+/=]+:?",
            r"\beyJ[\w-]{8,}(?:\.[\w-]*){1,4}",
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
            rf"\b(?:{'|'.join(map(re.escape, _PREFIXES.split()))}|wandb_v\d_|gl[a-z]{{2,5}}-)[\w.-]{{16,}}",
            r"\b\d{8,10}:AA[\w-]{30,}",  # Telegram
            r"\$(?:1|2[aby]|5|6|7|y|gy|apr1|argon2id?)\$[^\s:\"']{8,}",  # crypt(5)
            # A key of CURVE: 40 characters of Z85.
            r"(?<=[\"'\s=])(?=[^\s\"'/]{0,39}[!^*?&<>()\[\]{}@%$#])[\w.:+=^!*?&<>()\[\]{}@%$#-]{40}(?=[\"'\s]|\Z)",
        ),
    )
)
_WORD = re.compile(rf"(?<![\w/.+-])[A-Za-z0-9+/_-]{{{NOISE},}}+={{0,2}}+(?![\w/-]|\.\w)")
# The last line of base64 is short. _LINE stands for a whole one before it.
_LINE, _WHOLE = "\ue000", 56
_LAST_LINE = re.compile(
    rf"({_LINE}[\"',]{{0,2}}(?:\s{{0,40}}\n\s{{0,40}}|\\n)[\"']?)"
    r"(?:[A-Za-z0-9+/]{4}){0,40}(?:[A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)(?![\w+/=.-])"
)
_COLOUR = re.compile(r"(?:\x1b|\\u001b|\\x1b|\\033|\\e)\[[0-9;?]{0,40}[A-Za-z]")


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable of this name is a secret."""
    return name not in ("PWD", "OLDPWD") and bool(_SECRET_NAME.search(name))


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """The values of the variables whose names say that they are secrets."""
    return [value for name, value in environment.items() if is_secret_name(name) and len(value) >= LEAST]


def redacted(data: Any, known: Collection[str] = ()) -> Any:
    """Plain data with all its texts without secrets, and nothing below a name that says it is one."""
    if isinstance(data, str):
        return without_secrets(data, known)
    if isinstance(data, list):
        return _list([redacted(one, known) for one in data])
    if not isinstance(data, dict):
        return data
    named = any(isinstance(data.get(key), str) and is_secret_name(data[key]) for key in ("name", "key", "header"))
    found: dict[Any, Any] = {}
    for name, value in data.items():
        secret = isinstance(name, str) and (is_secret_name(name) or (named and name in ("value", "val")))
        told = without_secrets(name, known) if isinstance(name, str) else name
        while told in found:
            told += "'"  # two names may differ by their secrets only
        found[told] = _emptied(value, "token" in str(name).lower()) if secret else redacted(value, known)
    return found


def _emptied(data: Any, counts: bool) -> Any:
    """What stands below the name of a secret. counts: of tokens, which are no secret."""
    if isinstance(data, dict):
        return {name: _emptied(value, counts) for name, value in data.items()}
    if isinstance(data, list):
        return [_emptied(one, counts) for one in data]
    stays = data is None or isinstance(data, bool) or data == "" or (counts and isinstance(data, int | float))
    return data if stays else TAKEN_OUT


def _list(items: list[Any]) -> list[Any]:
    """A list in which one text may say of the next that it is a secret, as the words of a command do."""
    if len(items) < 2 or not all(isinstance(one, str) for one in items):
        return items
    text = json.dumps(items)
    told = _without_forms(text)
    if told == text:
        return items
    try:
        found = json.loads(told)
    except ValueError:
        found = None
    return found if isinstance(found, list) and len(found) == len(items) else [TAKEN_OUT] * len(items)


def without_secrets(text: str, known: Collection[str] = (), least: int = LEAST) -> str:
    """The text with TAKEN_OUT in place of what is, or looks like, a secret. known: secrets, wherever they stand, of at
    least so many characters, and as JSON, URLs and base64 write them."""
    text = _COLOUR.sub("", text)
    written = {form for value in known if len(value) >= least for form in _written(value, least)}
    for form in sorted(written, key=len, reverse=True):
        text = text.replace(form, TAKEN_OUT)
    return _without_forms(text)


def _written(value: str, least: int) -> list[str]:
    """Each form in which a text may have the value."""
    data = value.encode(errors="replace")
    forms = [value, json.dumps(value)[1:-1], urllib.parse.quote(value, safe=""), urllib.parse.quote_plus(value)]
    for before in range(3):  # base64 of a text that holds it: what its neighbours do not change
        whole = base64.b64encode(bytes(before) + data).decode()
        forms.append(whole[(0, 2, 3)[before] : len(whole) - (0, 3, 2)[(before + len(data)) % 3]])
    return [form for form in forms if len(form) >= least]


def _without_forms(text: str) -> str:
    for form in _HEADED:
        text = form.sub(_hidden, text)
    for form in _FORMS:
        text = form.sub(TAKEN_OUT, text)
    text = _LAST_LINE.sub(rf"\1{TAKEN_OUT}", _WORD.sub(_noise, text))
    return text.replace(_LINE, TAKEN_OUT)


def _hidden(match: re.Match[str]) -> str:
    """What stands before a secret, and TAKEN_OUT, in the secret's quotes: JSON stays JSON."""
    quote = match.groupdict().get("quote") or ""
    return f"{match['head']}{quote}{TAKEN_OUT}{quote}"


def _noise(match: re.Match[str]) -> str:
    """TAKEN_OUT for a word that looks as drawn by lot, _LINE if it may be a line of several."""
    word = match[0]
    kinds = [1 if one.isupper() else 2 if one.islower() else 3 if one.isdecimal() else 0 for one in word]
    upper, lower, digits = (kinds.count(kind) for kind in (1, 2, 3))
    changes = sum(a != b for a, b in pairwise(kinds)) / len(word)
    if "/" in word or not digits:  # it may be a path, or names put together
        drawn = changes >= 0.4 and min(upper, lower) >= len(word) / 8
    else:
        drawn = bool(upper and lower)
    return word if not drawn else TAKEN_OUT if len(word) < _WHOLE else _LINE
