"""verl as a stack: config mapping, trainer hooks, loss adapter, recorder, and what it takes to run on a CPU."""
