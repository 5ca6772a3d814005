"""Gemma 3 270M, to measure on a real pretrained model: ``make real-model`` makes it, no part of it is kept here."""
