"""Pure arithmetic from a run spec to a run plan. Standard library only; imports the spec and the errors."""
