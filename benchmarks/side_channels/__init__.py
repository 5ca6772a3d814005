"""The published attacks on speculative decoding's side channels, played against a real server."""
