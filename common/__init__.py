"""What two or more of the four scripts share: the drafter, the file formats, the target's tensors,
the command line."""
