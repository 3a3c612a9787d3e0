"""What `optiml bench` measures."""
