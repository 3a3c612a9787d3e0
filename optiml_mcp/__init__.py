"""The MCP server of OptiML."""
