"""The core: inputs come in, sensors and deciders are asked, and only here records are appended."""
