"""The cost of Unicron while nothing fails, in each layout, against plain Megatron-core."""
