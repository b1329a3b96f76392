"""A node is lost: how soon the job is whole again, with a hot spare there and without."""
