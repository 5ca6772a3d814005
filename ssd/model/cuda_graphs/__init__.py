"""Forward passes of fixed shapes, each captured as a CUDA graph and replayed with one launch."""
