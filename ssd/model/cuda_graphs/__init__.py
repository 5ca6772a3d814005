"""Forward passes of fixed shapes, captured as CUDA graphs and replayed with one launch each."""
