"""The smaller benchmarks, each a module with `Sizes`, `SMALLEST` and `measure(sizes, report)`."""
