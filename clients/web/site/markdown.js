import{b as a}from"./chunk-3FIHTMB3.js";import"./chunk-VQD2BKJI.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
