# The extension module pydflash._native: cffi's C code around dflash.h, in API mode.

if(NOT Python_Development.SABIModule_FOUND)
    message(FATAL_ERROR "DFLASH_PYTHON needs Python's headers (Python.h) for ${Python_EXECUTABLE}")
endif()

set(cdef "${CMAKE_CURRENT_BINARY_DIR}/dflash.cdef")
set(prelude "${CMAKE_CURRENT_SOURCE_DIR}/capi/prelude.c")
set(source "${CMAKE_CURRENT_BINARY_DIR}/_native.c")
set(cdef_inputs "${CMAKE_CURRENT_SOURCE_DIR}/capi/dflash.h" "${CMAKE_CURRENT_SOURCE_DIR}/capi/trampolines.cdef")

add_custom_command(
    OUTPUT "${cdef}"
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/capi/gen_cdef.py" ${cdef_inputs} --output "${cdef}"
    DEPENDS capi/gen_cdef.py ${cdef_inputs}
    VERBATIM
)
add_custom_command(
    OUTPUT "${source}"
    COMMAND "${Python_EXECUTABLE}" -m cffi.gen_src read-sources pydflash._native "${cdef}" "${prelude}" "${source}"
    DEPENDS "${cdef}" "${prelude}"
    VERBATIM
)

python_add_library(_native MODULE USE_SABI 3.11 WITH_SOABI "${source}")
target_link_libraries(_native PRIVATE dflash)
target_compile_options(_native PRIVATE -fvisibility=hidden)
set_target_properties(_native PROPERTIES INSTALL_RPATH "$ORIGIN")
install(TARGETS _native LIBRARY DESTINATION pydflash)
