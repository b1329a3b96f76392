"""What `unicronctl` is told."""
