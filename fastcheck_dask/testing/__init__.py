"""What tests of FastCheck and of programs that use it need: real servers, faults, fakes."""
