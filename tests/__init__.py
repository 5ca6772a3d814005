"""Tests: a file a module; ``reference`` holds the slow twins, the other modules without ``test_`` what tests share."""
