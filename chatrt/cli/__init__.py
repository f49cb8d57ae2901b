"""The command line: the only place that composes everything; one module for each command."""
