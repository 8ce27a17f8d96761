"""Results for people: tables in a terminal, one HTML file, a picture."""
