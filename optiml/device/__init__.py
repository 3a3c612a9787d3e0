"""Where kernels run: one protocol, one disposable child process per device, raw results and no verdicts."""
