"""Drafters: small, fast guesses of the next tokens, behind chatrt.drafter."""
