"""Draft heads: small networks that read the target's hidden states and say what it will probably say next."""
