"""Small parts that several programs share and that are nobody's subject."""
