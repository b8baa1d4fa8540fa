"""amprewrite as a value of options that trainers take already; each file needs the library that it is named after."""
