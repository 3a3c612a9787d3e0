"""From kernel text to a build: NVRTC in a sandboxed child, with what ptxas says of the result."""
