import{b as a}from"./chunk-2HD3NKCO.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
