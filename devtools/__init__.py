"""Tools of this repository's contributors. No distribution contains them; `./dev` and the tests import them."""
