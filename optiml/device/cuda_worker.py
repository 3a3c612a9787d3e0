"""The disposable child of a GPU: holds the CUDA context, carries out launch plans and answers raw results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from optiml.device.cuda_context import CudaContext, describe_devices
from optiml.device.wire import INDEX_VARIABLE
from optiml.errors import InvalidInput
from optiml.process import serve

Header = dict[str, Any]


class Service:
    """Answers the calls of `CudaDevice`."""

    def __init__(self, context: CudaContext | None) -> None:
        self._context = context

    def handle(self, header: Header, blobs: Sequence[memoryview]) -> tuple[Header, Sequence[memoryview]]:
        """One call: the fields beside `op` are those that `CudaContext` takes."""
        if header["op"] == "devices":
            return {"devices": describe_devices()}, ()
        if self._context is None:
            raise InvalidInput("this process has opened no device")
        if header["op"] == "run":
            return self._context.run(header, blobs[0], blobs[1:])
        if header["op"] == "open_timer":
            return self._context.open_timer(header, blobs)
        if header["op"] == "sample":
            return self._context.sample(header)
        if header["op"] == "timed_outputs":
            return self._context.timed_outputs(header)
        if header["op"] == "repeat":
            return self._context.repeat(header)
        return self._context.close_timer()


def main() -> None:
    index = os.environ.get(INDEX_VARIABLE)
    serve(Service(None if index is None else CudaContext(int(index))).handle)


if __name__ == "__main__":
    main()
