"""Pure arithmetic: no clock, file, process or GPU. Standard library and numpy only."""
