#include "capi/dflash.h"

const char * dflash_status_name(int32_t status) {
    switch (status) {
    case DFLASH_STATUS_OK:
        return "OK";
    case DFLASH_STATUS_INVALID:
        return "INVALID";
    case DFLASH_STATUS_OOM:
        return "OOM";
    case DFLASH_STATUS_CANCELLED:
        return "CANCELLED";
    case DFLASH_STATUS_NOT_FOUND:
        return "NOT_FOUND";
    case DFLASH_STATUS_FORMAT:
        return "FORMAT";
    case DFLASH_STATUS_UNSUPPORTED:
        return "UNSUPPORTED";
    case DFLASH_STATUS_MISMATCH:
        return "MISMATCH";
    case DFLASH_STATUS_CAPACITY:
        return "CAPACITY";
    case DFLASH_STATUS_BUSY:
        return "BUSY";
    case DFLASH_STATUS_POISONED:
        return "POISONED";
    case DFLASH_STATUS_DEVICE:
        return "DEVICE";
    case DFLASH_STATUS_INTERNAL:
        return "INTERNAL";
    default:
        return "UNKNOWN";
    }
}

int32_t dflash_abi_version(void) {
    return DFLASH_ABI_VERSION;
}

const char * dflash_version(void) {
    return DFLASH_VERSION;
}
