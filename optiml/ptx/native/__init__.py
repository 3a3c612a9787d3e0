"""The native PTX engine: one opcode table, generated C handlers, and a C runtime that runs 32 lanes per operation.

How to add an opcode: add its row to `table.py` and a case to `tests/emulator/test_native_opcodes.py`; the lowering and
the C are made from the row.
"""
