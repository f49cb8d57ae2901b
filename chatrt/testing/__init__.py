"""Public fakes for tests of chatrt and of programs that use it."""
