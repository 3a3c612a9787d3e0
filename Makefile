.PHONY: check test gpu bench conformance inspector agents bench-mcp soak
check:
	ruff check .
	ruff format --check optiml optiml_mcp tools tests
	mypy
test:
	pytest
gpu:
	pytest -m gpu
bench:
	python tools/bench_ptx.py --json
# The npm suites of MCP; they skip with a reason where npm is missing. Packages are kept in build/node.
conformance:
	python tools/conformance.py --folder build/node
inspector:
	python tools/inspector.py --folder build/node
# Claude Code and Codex, driven by a scripted model on this machine; 800 MB from npm, so not part of CI.
agents:
	python tools/agents.py --folder build/node --json benchmarks/agents.json
# Cold start and cached answers; needs a quiet machine for the wall clock.
bench-mcp:
	python tools/bench_mcp.py --json benchmarks/mcp_speed.json
soak:
	python tools/soak_mcp.py --calls 1000 --clients 8 --json benchmarks/mcp_soak.json
