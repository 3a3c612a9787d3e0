.PHONY: check test gpu bench
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
