"""Decoding recorded text with drafts, without a model: what steps accept, and what that is worth."""
