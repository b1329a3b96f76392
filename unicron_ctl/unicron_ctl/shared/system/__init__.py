"""Small parts that several programs share."""
