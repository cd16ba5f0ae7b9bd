"""Where this package meets SGLang; what is bound to a version of SGLang is here."""
