"""Names of the saved form, apart from the code that needs torch."""

METHOD = "sdsie_int4"
FORMAT = 1
CODES, SCALES, ZEROS, FACTORS = "int4_codes", "int4_scales", "int4_zeros", "int4_factors"
