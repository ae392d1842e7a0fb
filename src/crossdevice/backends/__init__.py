"""Arrays: one file per library; each is a guest that only its own file imports."""
