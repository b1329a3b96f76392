"""What Unicron costs while nothing fails, in each layout, against plain Megatron-core."""
