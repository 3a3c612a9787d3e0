"""Language models behind one protocol: `optiml.llm.model`."""
