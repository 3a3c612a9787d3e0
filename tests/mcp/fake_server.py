"""The real server over the fake workbench, as a program on stdio."""

from fakes import FakeWorkbench

from optiml_mcp.serve import serve_stdio
from optiml_mcp.server import build_server

if __name__ == "__main__":
    serve_stdio(build_server(FakeWorkbench))
