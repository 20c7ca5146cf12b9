"""Tool calls: into the prompt (`prompt`), out of the text (`parser`, by one of `formats`), and forced (`choice`)."""
