"""Pure measurements that both stacks take of a batch."""
