"""A whole job: composed and checked before anything starts, launched, watched over, cleaned up after."""
