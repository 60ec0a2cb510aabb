"""How the sampler is delayed and batches are replayed: pure schedules, no tensors."""
