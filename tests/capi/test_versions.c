#include "dflash.h"

#include <stdio.h>
#include <string.h>

int main(void) {
    dflash_error err = DFLASH_ERROR_INIT;
    if (err.struct_size != sizeof(dflash_error) || dflash_abi_version() != DFLASH_ABI_VERSION) {
        printf("library speaks ABI version %d, header %d\n", (int)dflash_abi_version(), DFLASH_ABI_VERSION);
        return 1;
    }
    if (strchr(dflash_version(), '.') == NULL) {
        printf("version is '%s'\n", dflash_version());
        return 1;
    }
    if (strcmp(dflash_status_name(DFLASH_STATUS_CAPACITY), "CAPACITY") != 0 ||
        strcmp(dflash_status_name(1), "UNKNOWN") != 0) {
        printf("wrong status names\n");
        return 1;
    }
    printf("libdflash %s, ABI %d\n", dflash_version(), (int)dflash_abi_version());
    return 0;
}
