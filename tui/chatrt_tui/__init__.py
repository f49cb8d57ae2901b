"""The Textual terminal client. Never imports torch."""
