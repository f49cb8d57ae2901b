"""Training of the draft head: conversations from the target itself, features, steps, a card."""
