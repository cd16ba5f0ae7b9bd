"""Drafting and verifying: what decides tokens, knowing nothing of SGLang."""
