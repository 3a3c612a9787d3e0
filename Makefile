.PHONY: check test gpu bench conformance inspector agents bench-mcp soak sanitize corpus fuzz
check:
	ruff check .
	ruff format --check optiml optiml_mcp tools tests
	mypy
test:
	pytest -n auto
gpu:
	pytest -m gpu
# The native engine under AddressSanitizer and UBSan, then under ThreadSanitizer; several minutes each.
sanitize:
	python tools/sanitize.py
	python tools/sanitize.py --threads
# What nvcc and NVRTC for sm_90 make of the corpus, through the tests of its kernels.
corpus:
	for text in compute_90 sm_80 sm_90; do OPTIML_CORPUS=$$text pytest -q tests/emulator/test_corpus_a.py tests/emulator/test_corpus_bc.py || exit 1; done
fuzz:
	python tools/fuzz_ptx.py --inputs 100000
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
