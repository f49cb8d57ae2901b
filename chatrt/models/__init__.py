"""Models: configuration, files, weights, and one ragged forward. Knows no sessions, no sampling."""
