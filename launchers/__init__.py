"""The freezing launcher and the places that it dispatches to."""
