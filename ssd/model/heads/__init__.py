"""Draft heads: small networks that predict the next tokens from the target's hidden states."""
